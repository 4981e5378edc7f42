// The dashboard: shows what the API says, and evicts and pins through it. No framework, nothing from a network.
"use strict";

const POLL_MS = 5000;
const TREE_MS = 60000;
const HISTORY_S = 3600;
const SOURCES = ["host", "disk", "shared", "missed"];
const MAX_BARS = 60;
const MIN_RANGE_S = 60; // a server that has just started shows what it has

const state = {
  token: sessionStorage.getItem("tierkv-token") || "",
  access: { may_read: false, may_change: false, asks_token: false },
  history: null,
  range: 900,
  tree: null,
  treeAt: 0,
  folds: new Map(), // id of a run -> open or not, where the user has said
  evict: null,
  pin: null,
};

const $ = (id) => document.getElementById(id);

// -- small helpers

/** Make an element; text goes in as text, so that nothing that is stored can become markup. */
function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "class") node.className = value;
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (value === true) node.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null));
  return node;
}

function svg(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}

const count = (n) => Number(n).toLocaleString("en");
const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : word.endsWith("x") ? "es" : "s"}`;
const sum = (values) => values.reduce((a, b) => a + b, 0);
const total = (byTier) => sum(Object.values(byTier));

function size(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  let value = nbytes;
  while (value >= 1023.5 && at < units.length - 1) { value /= 1024; at += 1; }
  return `${at && value < 99.95 ? value.toFixed(1) : Math.round(value)} ${units[at]}`;
}

function span(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h`;
  return `${Math.floor(s / 86400)} d`;
}

const now = () => Date.now() / 1000;
const ago = (time) => (time ? `${span(now() - time)} ago` : "never");

/** Return a time of day, with seconds where `fine`. */
function clock(time, fine = true) {
  const parts = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  if (fine) parts.second = "2-digit";
  return new Date(time * 1000).toLocaleTimeString([], parts);
}

class ApiError extends Error {
  constructor(status, sentence, result) {
    super(sentence);
    this.status = status;
    this.result = result;
  }
}

async function api(path, body) {
  const headers = { "X-TierKV-Admin": "1" };
  if (state.token) headers.Authorization = `Bearer ${state.token}`;
  const options = { headers, cache: "no-store", credentials: "omit" };
  if (body !== undefined) {
    options.method = "POST";
    options.body = JSON.stringify(body);
    headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new ApiError(0, "the server does not answer; trying again every 5 s");
  }
  const reply = await response.json().catch(() => ({ error: `the server said ${response.status}` }));
  if (!response.ok) throw new ApiError(response.status, reply.error, reply.result);
  return reply;
}

function say(sentence) {
  $("toast").textContent = sentence;
  $("toast").hidden = false;
  clearTimeout(say.timer);
  say.timer = setTimeout(() => { $("toast").hidden = true; }, 6000);
}

function warn(sentence) {
  $("alert").textContent = sentence || "";
  $("alert").hidden = !sentence;
}

// -- polling

async function poll() {
  try {
    state.access = await api("v1/access");
    $("token-button").hidden = !state.access.asks_token;
    $("token-button").textContent = state.token ? "Token set" : "Token";
    if (!state.access.may_read) {
      $("main").hidden = true;
      $("server").textContent = "";
      badge($("state"), "locked", "warn");
      warn("This server asks for a token: press Token.");
      return;
    }
    const newest = state.history ? state.history.times.at(-1) || 0 : 0;
    const [stat, history] = await Promise.all([api("v1/stat"), api(`v1/history?since=${newest}`)]);
    remember(history);
    $("main").hidden = false;
    warn("");
    showServer(stat);
    showTiles(stat);
    showCharts();
    showTiers(stat.tiers);
    showEngines(stat.engines);
    if (Date.now() - state.treeAt > TREE_MS && !document.querySelector("dialog[open]")) await loadTree();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401 && state.token) setToken("");
    badge($("state"), error.status ? "trouble" : "no answer", "bad");
    warn(error.message);
  }
}

async function forever() {
  for (;;) {
    if (!document.hidden) await poll().catch((error) => { warn(`this page has a fault: ${error.message}`); });
    await new Promise((resolve) => { forever.wake = resolve; setTimeout(resolve, POLL_MS); });
  }
}

/** Add samples to those that are here, and let go of those older than an hour. */
function remember(more) {
  const have = state.history;
  if (!have || !have.times.length) { state.history = more; return; }
  const missing = have.times.length;
  const join = (a, b, fill) => (a || Array(missing).fill(fill)).concat(b || Array(more.times.length).fill(fill));
  have.times = have.times.concat(more.times);
  have.engines = have.engines.concat(more.engines);
  for (const name of SOURCES) have.chunks[name] = have.chunks[name].concat(more.chunks[name]);
  for (const name of new Set([...Object.keys(have.tiers), ...(more.times.length ? Object.keys(more.tiers) : [])])) {
    const a = have.tiers[name] || {};
    const b = more.tiers[name] || {};
    have.tiers[name] = {
      nbytes: join(a.nbytes, b.nbytes, 0), queued_nbytes: join(a.queued_nbytes, b.queued_nbytes, 0), up: join(a.up, b.up, false),
    };
  }
  const old = have.times.findIndex((time) => time > now() - HISTORY_S - 60);
  if (old > 0) {
    const cut = (list) => list.slice(old);
    have.times = cut(have.times);
    have.engines = cut(have.engines);
    for (const name of SOURCES) have.chunks[name] = cut(have.chunks[name]);
    for (const tier of Object.values(have.tiers)) for (const key of Object.keys(tier)) tier[key] = cut(tier[key]);
  }
}

// -- header and summary

function badge(node, text, kind) {
  node.textContent = text;
  node.className = `badge ${kind}`;
}

function kindOf(tier) {
  if (tier.state === "up") return tier.reason ? "warn" : "good";
  return tier.state === "none" ? "" : tier.state === "out" ? "bad" : "warn";
}

function showServer(stat) {
  const server = stat.server;
  $("server").textContent = `${server.version} · pid ${server.pid} · up ${span(server.uptime_s)} · ${server.disk_dir}`
    + (server.shared_url ? ` · ${server.shared_url}` : "");
  const stores = stat.tiers.filter((tier) => tier.name !== "host");
  if (stores.every((tier) => tier.state === "out")) badge($("state"), "not ready", "bad");
  else if (stores.some((tier) => tier.state !== "up" || tier.reason)) badge($("state"), "degraded", "warn");
  else badge($("state"), "ready", "good");
}

function tile(id, value, label, title) {
  return el("div", { class: "tile", id: `tile-${id}`, title }, el("b", {}, value), el("span", { class: "faint" }, label));
}

function showTiles(stat) {
  const asked = growth(state.range);
  const all = sum(Object.values(asked));
  const hits = all - asked.missed;
  const stored = sum(stat.tiers.filter((tier) => tier.name !== "host").map((tier) => tier.nbytes));
  const queued = sum(stat.tiers.map((tier) => tier.queued_nbytes));
  const silent = stat.server.num_silent_engines;
  const window = state.range >= 3600 ? "1 h" : `${state.range / 60} min`;
  $("tiles").replaceChildren(
    tile("rate", all ? `${(100 * hits / all).toFixed(1)} %` : "–", `hit rate, last ${window}`),
    tile("asked", count(all), `chunks asked, last ${window}`),
    tile("stored", size(stored), "stored below the host", `${stored} bytes`),
    tile("queued", size(queued), "wait to be written", `${queued} bytes`),
    tile("engines", count(stat.server.num_engines), silent ? `engines, ${silent} silent` : stat.server.num_engines === 1 ? "engine" : "engines"),
  );
}

// -- charts

/** Return by how much each counter grew over the last `seconds`. */
function growth(seconds) {
  const h = state.history;
  const first = h.times.findIndex((time) => time >= now() - seconds - 1);
  const grown = {};
  for (const name of SOURCES) {
    const list = h.chunks[name];
    grown[name] = first < 0 ? 0 : Math.max(0, list.at(-1) - list[Math.max(0, first - 1)]);
  }
  return grown;
}

function key(name, value) {
  return el("span", { class: `key ${name}` }, el("span", {}, `${name} `), el("b", {}, value));
}

function showCharts() {
  for (const button of $("range").children) button.setAttribute("aria-pressed", String(Number(button.dataset.range) === state.range));
  const times = state.history.times;
  const end = times.at(-1) || now();
  const start = Math.max(end - state.range, Math.min(times[0] || end, end - MIN_RANGE_S));
  showRate(start, end);
  showBytes(start, end);
}

function frame(plot, label) {
  const width = Math.max(240, plot.clientWidth);
  const height = 190;
  const box = { left: 44, right: width - 8, top: 8, bottom: height - 22 };
  const picture = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  return { box, picture };
}

function axes(picture, box, start, end, ticks) {
  for (const [share, text] of ticks) {
    const y = box.bottom - share * (box.bottom - box.top);
    picture.append(svg("line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y }));
    const label = svg("text", { x: box.left - 7, y: y + 4, "text-anchor": "end" });
    label.textContent = text;
    picture.append(label);
  }
  for (const [at, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
    const label = svg("text", { x: box.left + at * (box.right - box.left), y: box.bottom + 17, "text-anchor": anchor });
    label.textContent = clock(start + at * (end - start), end - start <= 600);
    picture.append(label);
  }
}

/** Bars of the shares of what gave the chunks, a bar for a part of the range; a part without requests has none. */
function showRate(start, end) {
  const h = state.history;
  const step = Math.max(h.interval_s, (end - start) / MAX_BARS);
  const bars = new Map();
  for (let i = 1; i < h.times.length; i += 1) {
    if (h.times[i] <= start) continue;
    const at = Math.min(Math.floor((h.times[i] - start) / step), Math.ceil((end - start) / step) - 1);
    const bar = bars.get(at) || Object.fromEntries(SOURCES.map((name) => [name, 0]));
    for (const name of SOURCES) bar[name] += Math.max(0, h.chunks[name][i] - h.chunks[name][i - 1]);
    bars.set(at, bar);
  }
  const grown = growth(state.range);
  const all = sum(Object.values(grown));
  const share = (name) => (all ? `${(100 * grown[name] / all).toFixed(1)} %` : "–");
  const { box, picture } = frame($("rate-plot"), `Shares: ${SOURCES.map((name) => `${name} ${share(name)}`).join(", ")}`);
  axes(picture, box, start, end, [[0, "0"], [0.5, "50 %"], [1, "100 %"]]);
  const wide = (box.right - box.left) * step / (end - start);
  const high = box.bottom - box.top;
  for (const [at, bar] of bars) {
    const asked = sum(Object.values(bar));
    if (!asked) continue;
    const x = box.left + at * wide;
    let y = box.bottom;
    for (const name of SOURCES) {
      const part = high * bar[name] / asked;
      if (!part) continue;
      y -= part;
      picture.append(svg("rect", { class: `bar ${name}`, x: x + 0.75, y, width: Math.max(1, wide - 1.5), height: part }));
    }
    const title = svg("title");
    title.textContent = `${clock(start + at * step)}: ${SOURCES.map((name) => `${name} ${count(bar[name])}`).join(", ")}`;
    picture.append(svg("rect", { class: "hit", x, y: box.top, width: wide, height: high }, title));
  }
  $("rate-legend").replaceChildren(...SOURCES.map((name) => key(name, share(name))));
  $("rate-plot").replaceChildren(picture, ...(all ? [] : [quiet("No request in this time.")]));
}

function quiet(sentence) {
  return el("p", { class: "faint quiet" }, sentence);
}

function showBytes(start, end) {
  const h = state.history;
  const names = Object.keys(h.tiers);
  const from = Math.max(0, h.times.findIndex((time) => time >= start));
  const most = Math.max(1, ...names.map((name) => Math.max(0, ...h.tiers[name].nbytes.slice(from))));
  const step = 2 ** Math.ceil(Math.log2(most / 4));
  const top = step * Math.ceil(most / step);
  const last = (name) => h.tiers[name].nbytes.at(-1) || 0;
  const { box, picture } = frame($("bytes-plot"), `Bytes: ${names.map((name) => `${name} ${size(last(name))}`).join(", ")}`);
  const ticks = [];
  for (let value = 0; value <= top; value += step) ticks.push([value / top, value ? size(value) : "0"]);
  axes(picture, box, start, end, ticks);
  const x = (time) => box.left + (box.right - box.left) * (time - start) / (end - start);
  const y = (nbytes) => box.bottom - (box.bottom - box.top) * nbytes / top;
  for (const name of names) {
    const points = [];
    for (let i = from; i < h.times.length; i += 1) points.push([x(h.times[i]), y(h.tiers[name].nbytes[i])]);
    const line = points.map((point) => point.map((v) => v.toFixed(1)).join(",")).join(" ");
    if (points.length > 1) picture.append(svg("polyline", { class: name, points: line }));
    else if (points.length) picture.append(svg("circle", { class: name, cx: points[0][0], cy: points[0][1], r: 3 }));
  }
  $("bytes-legend").replaceChildren(...names.map((name) => key(name, size(last(name)))));
  $("bytes-plot").replaceChildren(picture);
}

// -- tiers and engines

const COUNTS = [
  ["num_entries", "chunks"], ["num_hits", "hits"], ["num_misses", "misses"], ["num_stored", "stored"],
  ["num_evicted", "evicted"], ["num_expired", "expired"], ["num_removed", "removed"], ["num_dropped", "dropped"],
  ["num_declined", "declined"], ["num_bad", "damaged"], ["num_errors", "errors"],
];

function showTiers(tiers) {
  $("tiers").replaceChildren(...tiers.map((tier) => {
    const bar = el("div", { class: `track ${tier.name}` }, el("i"));
    bar.firstChild.style.width = tier.budget ? `${Math.min(100, 100 * tier.nbytes / tier.budget)}%` : "0";
    const list = el("dl");
    const add = (field, label, text) => list.append(el("div", {}, el("dt", {}, label), el("dd", { "data-field": field }, text)));
    for (const [field, label] of COUNTS) if (tier[field] !== undefined) add(field, label, count(tier[field]));
    add("queued_nbytes", "queued", size(tier.queued_nbytes));
    if (tier.pinned_nbytes) add("pinned_nbytes", "pinned", size(tier.pinned_nbytes));
    const state_ = el("span", { class: `badge ${kindOf(tier)}`, "data-field": "state" }, tier.state);
    const since = tier.since ? `${tier.reason}, for ${span(now() - tier.since)}` : tier.reason;
    return el("div", { class: `card tier ${tier.name}`, id: `tier-${tier.name}` },
      el("div", { class: "top" }, el("h3", {}, tier.name), state_),
      since ? el("p", { class: tier.state === "none" ? "faint" : "trouble", "data-field": "reason" }, since) : null,
      el("div", { class: "size" }, el("b", { "data-field": "nbytes", title: `${tier.nbytes} bytes` }, size(tier.nbytes)),
        el("span", { class: "faint" }, tier.budget ? `of ${size(tier.budget)}` : tier.name === "host" ? "" : "no budget of its own")),
      tier.budget ? bar : null,
      list);
  }));
}

function showEngines(engines) {
  if (!engines.length) {
    $("engines").replaceChildren(el("caption", { class: "empty" }, "No engine is connected."));
    return;
  }
  const heads = [["engine"], ["pid", 1], ["slots used", 1], ["pool", 1], ["host", 1], ["disk", 1], ["shared", 1], ["missed", 1], ["loaded", 1], ["store queue", 1]];
  const rows = engines.map((engine) => {
    const c = (name) => engine.counters[name] || 0;
    const cells = [
      String(engine.pid), `${count(engine.num_entries)} of ${count(engine.num_slots)}`, size(engine.budget), count(c("host_hits")),
      count(c("disk_hits")), count(c("shared_hits")), count(c("missed")), size(c("load_nbytes")), size(c("store_queue_nbytes")),
    ];
    return el("tr", {}, el("td", {}, engine.engine_id), ...cells.map((text) => el("td", { class: "num" }, text)));
  });
  $("engines").replaceChildren(
    el("thead", {}, el("tr", {}, ...heads.map(([text, right]) => el("th", { class: right ? "num" : "", scope: "col" }, text)))),
    el("tbody", {}, ...rows));
}

// -- the tree of prefixes

async function loadTree() {
  state.treeAt = Date.now();
  state.tree = await api(`v1/tree?sort=${$("sort").value}`);
  showTree();
}

function showTree() {
  const spaces = state.tree.namespaces.filter((ns) => ns.num_chunks);
  $("tree-age").textContent = `as of ${clock(state.treeAt / 1000)}`;
  if (!spaces.length) {
    $("tree").replaceChildren(el("p", { class: "empty" }, "Nothing is stored yet. Prefixes appear once an engine has stored a whole chunk."));
    return;
  }
  $("tree").replaceChildren(...spaces.flatMap((ns) => [
    el("div", { class: "ns" }, el("h3", {}, ns.model),
      el("span", { class: "faint" }, `${plural(ns.num_chunks, "chunk")} of ${ns.chunk_tokens} tokens, ${tiersText(ns.nbytes)} · `,
        el("code", { title: ns.id }, ns.id.slice(0, 8)))),
    branch(ns, ns.roots, ns.num_hidden, 0),
  ]));
}

const tiersText = (nbytes) => ["host", "disk", "shared"].filter((t) => nbytes[t]).map((t) => `${t} ${size(nbytes[t])}`).join(", ");

function branch(ns, nodes, numHidden, depth) {
  const list = el("ul", {}, ...nodes.map((node) => item(ns, node, depth)));
  if (numHidden) list.append(el("li", { class: "hidden-runs faint" }, `and ${plural(numHidden, "smaller one")}, not shown`));
  return list;
}

function item(ns, node, depth) {
  const inner = node.children.length + node.num_hidden > 0;
  const open = inner && (state.folds.has(node.id) ? state.folds.get(node.id) : depth < 1);
  const below = inner ? branch(ns, node.children, node.num_hidden, depth + 1) : null;
  if (below) below.hidden = !open;
  const toggle = inner
    ? el("button", {
      class: "toggle", type: "button", "aria-expanded": String(open), "aria-label": `what continues ${node.id}`,
      onclick: (event) => {
        const wanted = below.hidden;
        state.folds.set(node.id, wanted);
        below.hidden = !wanted;
        event.currentTarget.setAttribute("aria-expanded", String(wanted));
      },
    }, svg("svg", { viewBox: "0 0 12 12", "aria-hidden": "true" }, svg("path", { d: "M4 1.5 9 6l-5 4.5z" })))
    : el("span");
  const from = node.start * ns.chunk_tokens;
  const what = `tokens ${count(from)} to ${count(from + node.num_tokens)}` + (inner ? `, ${plural(node.num_prefixes, "prefix")}` : "");
  const pinned = node.pins.length ? el("span", { class: "badge good", title: node.pins.map((pin) => `${pin.owner}, ${span(pin.until - now())} left`).join("; ") }, "pinned") : null;
  const bar = el("div", { class: "track", title: tiersText(node.nbytes) });
  const whole = total(ns.nbytes);
  for (const tier of ["host", "disk", "shared"]) {
    if (!node.nbytes[tier]) continue;
    const part = el("i", { class: tier });
    part.style.width = `${100 * node.nbytes[tier] / whole}%`;
    bar.append(part);
  }
  const may = state.access.may_change;
  const hint = may ? null : "needs the admin's token";
  return el("li", { "data-id": node.id },
    el("div", { class: "node" }, toggle, el("code", {}, node.id), el("span", { class: "what" }, what, pinned), bar,
      el("span", { class: "num size", title: tiersText(node.nbytes) }, size(total(node.nbytes))),
      el("span", { class: "num hits" }, plural(node.hits, "hit")),
      el("span", { class: "num used faint" }, ago(node.last_used)),
      el("span", { class: "acts" },
        el("button", { type: "button", class: "pin-button", disabled: !may, title: hint, onclick: () => openPin(ns, node) }, "Pin"),
        el("button", { type: "button", class: "evict-button", disabled: !may, title: hint, onclick: () => openEvict(ns, node) }, "Evict"))),
    below);
}

// -- evict: first what would go, then a confirmation

function openEvict(ns, node) {
  state.evict = { ns: ns.id, prefix: node.id };
  $("evict-id").textContent = node.id;
  $("evict-force").checked = false;
  $("evict-dialog").showModal();
  planEvict();
}

async function planEvict() {
  const wanted = { ...state.evict, dry_run: true, force: $("evict-force").checked };
  $("evict-do").disabled = true;
  $("evict-do").textContent = "Evict";
  $("evict-plan").replaceChildren(el("p", { class: "faint" }, "looking at what would go"));
  try {
    const plan = await api("v1/evict", wanted);
    if (state.evict === null || state.evict.prefix !== wanted.prefix) return;
    $("evict-plan").replaceChildren(...describePlan(plan));
    $("evict-force-line").hidden = !plan.num_pinned && !wanted.force;
    $("evict-do").textContent = `Evict ${plural(plan.num_removed, "chunk")}`;
    $("evict-do").disabled = !plan.num_removed;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    $("evict-force-line").hidden = error.status !== 409;
    $("evict-plan").replaceChildren(el("p", { class: "trouble" }, error.message));
  }
}

function describePlan(plan) {
  const rows = Object.entries(plan.removed).map(([tier, num]) => el("tr", { "data-tier": tier },
    el("td", {}, tier), el("td", { class: "num" }, count(num)), el("td", { class: "num" }, size(plan.nbytes[tier]))));
  return [
    el("p", {}, `${plural(plan.prefixes.length, "prefix")} would be gone. What other prefixes share stays.`),
    el("table", { id: "evict-table" },
      el("thead", {}, el("tr", {}, el("th", {}, "tier"), el("th", { class: "num" }, "chunks"), el("th", { class: "num" }, "bytes"))),
      el("tbody", {}, ...rows)),
    plan.num_pinned ? el("p", { class: "faint" }, `${plural(plan.num_pinned, "chunk")} stay, which are pinned or before pinned ones.`) : null,
    ...plan.incomplete.map((sentence) => el("p", { class: "trouble" }, sentence)),
  ].filter((node) => node !== null);
}

async function doEvict() {
  $("evict-do").disabled = true;
  try {
    const result = await api("v1/evict", { ...state.evict, force: $("evict-force").checked });
    $("evict-dialog").close();
    say(`Evicted: ${Object.entries(result.removed).map(([tier, num]) => `${tier} ${count(num)}`).join(", ")} chunks.`);
    await loadTree();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    $("evict-plan").replaceChildren(el("p", { class: "trouble" }, error.message));
  }
  poll();
}

// -- pin

function openPin(ns, node) {
  state.pin = { ns: ns.id, prefix: node.id };
  $("pin-id").textContent = node.id;
  $("pin-error").textContent = "";
  $("pins").replaceChildren(...node.pins.map((pin) => el("p", { class: "pin" },
    el("span", {}, `${pin.owner}, ${span(pin.until - now())} left`),
    el("button", { type: "button", onclick: () => change("v1/unpin", { ...state.pin, owner: pin.owner }, `Unpinned for ${pin.owner}`) }, "Unpin"))));
  $("pin-dialog").showModal();
}

function doPin(event) {
  event.preventDefault();
  const owner = $("pin-owner").value;
  change("v1/pin", { ...state.pin, owner, seconds: Number($("pin-seconds").value) }, `Pinned for ${owner}`);
}

async function change(path, body, done) {
  try {
    const result = await api(path, body);
    const parts = Object.entries(result.tiers).map(([tier, num]) => `${tier} ${count(num)} of ${count(result.num_chunks)}`);
    $("pin-dialog").close();
    say(`${done}: ${parts.join(", ")} chunks.`);
    await loadTree();
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    $("pin-error").textContent = error.message;
  }
}

// -- token

function setToken(token) {
  state.token = token;
  if (token) sessionStorage.setItem("tierkv-token", token);
  else sessionStorage.removeItem("tierkv-token");
}

function useToken(token) {
  setToken(token);
  $("token").value = "";
  $("token-dialog").close();
  state.treeAt = 0;
  poll();
}

// -- start

$("token-button").addEventListener("click", () => $("token-dialog").showModal());
$("token-cancel").addEventListener("click", () => $("token-dialog").close());
$("token-forget").addEventListener("click", () => useToken(""));
$("token-dialog").querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  useToken($("token").value.trim());
});
$("evict-cancel").addEventListener("click", () => $("evict-dialog").close());
$("evict-force").addEventListener("change", planEvict);
$("evict-do").addEventListener("click", doEvict);
$("pin-cancel").addEventListener("click", () => $("pin-dialog").close());
$("pin-form").addEventListener("submit", doPin);
$("sort").addEventListener("change", () => loadTree().catch((error) => warn(error.message)));
$("reload").addEventListener("click", () => loadTree().catch((error) => warn(error.message)));
$("range").addEventListener("click", (event) => {
  if (!event.target.dataset.range) return;
  state.range = Number(event.target.dataset.range);
  if (state.history) { showCharts(); poll(); }
});
window.addEventListener("resize", () => { if (state.history && !$("main").hidden) showCharts(); });
document.addEventListener("visibilitychange", () => { if (!document.hidden && forever.wake) forever.wake(); });
forever();
