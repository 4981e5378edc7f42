"""Epochs, and how vLLM's engine core tells of them: a version is shared, KV of other weights never."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_bench import CHUNK_TOKENS, Bench, small_world
from tierkv.config import EngineConfig
from tierkv.errors import ConfigError
from tierkv_connector import weights
from tierkv_connector.epochs import NO_EPOCH, Epochs, version_name


def test_an_engine_starts_with_what_its_files_say_or_with_a_version() -> None:
    assert (Epochs().name, Epochs().shared, Epochs().clean) == (b"", True, True)
    assert Epochs("step-0").name == version_name("step-0") != Epochs("step-1").name
    assert version_name("step-100").hex() == (
        "76657273696f6e3a" + "948613a43eef857b1564e98a1b063fd2511b5e34083cb4ea55c4220e0dafa06e"
    ), "the same bytes for ever: they are part of keys"


def test_a_reset_is_nobody_elses() -> None:
    one, other = Epochs(), Epochs()
    for epochs in (one, other):
        epochs.reset(gpu_is_empty=True)
    assert one.name != other.name and not one.shared and one.of_new_requests == 1
    name = one.name
    one.reset(gpu_is_empty=True)
    assert one.name != name


def test_two_engines_that_are_told_one_version_share_it() -> None:
    one, other = Epochs(), Epochs("step-99")
    for epochs in (one, other):
        epochs.reset(gpu_is_empty=True)
        assert epochs.tell("step-100", gpu_is_empty=True)
    assert one.name == other.name == version_name("step-100") and one.shared
    assert not one.tell("step-100", gpu_is_empty=True), "told again it is no other epoch"
    assert one.tell("step-101", gpu_is_empty=True) and one.name != other.name


@pytest.mark.parametrize("version", [None, "step-5"])
def test_the_weights_of_the_start_come_back_by_vllms_name(version: str | None) -> None:
    epochs = Epochs(version)
    first = epochs.name
    epochs.reset(gpu_is_empty=True)
    assert epochs.tell("default", gpu_is_empty=True)
    assert (epochs.name, epochs.shared, epochs.number) == (first, True, 2)


def test_a_version_told_while_old_kv_is_on_the_gpu_waits_until_it_is_not() -> None:
    epochs = Epochs()
    assert epochs.tell("step-100", gpu_is_empty=False)
    assert not epochs.shared and epochs.of_new_requests == NO_EPOCH
    epochs.reset(gpu_is_empty=False)
    assert not epochs.shared and epochs.of_new_requests == NO_EPOCH, "vLLM refused to empty it"
    epochs.reset(gpu_is_empty=True)
    assert epochs.name == version_name("step-100") and epochs.shared and epochs.of_new_requests == epochs.number
    epochs.reset(gpu_is_empty=True)
    assert not epochs.shared, "it was told for the reset that followed, not for every one"


def test_weights_that_change_before_the_reset_are_not_that_version() -> None:
    epochs = Epochs()
    epochs.tell("step-100", gpu_is_empty=False)
    epochs.weights_change(gpu_is_empty=False)
    epochs.reset(gpu_is_empty=True)
    assert not epochs.shared


def test_a_change_of_weights_cuts_off_the_version() -> None:
    epochs = Epochs()
    epochs.tell("step-100", gpu_is_empty=True)
    assert epochs.weights_change(gpu_is_empty=True)
    assert not epochs.shared and epochs.clean
    before = epochs.number
    for _ in range(100):  # weights come in pieces
        epochs.weights_change(gpu_is_empty=False)
    assert epochs.number == before + 1 and epochs.of_new_requests == NO_EPOCH


@pytest.mark.parametrize("told", [False, True])
def test_a_gpu_that_vllm_empties_alone_ends_the_wait(told: bool) -> None:
    epochs = Epochs()
    epochs.weights_change(gpu_is_empty=False)
    if told:
        epochs.tell("step-3", gpu_is_empty=False)
    epochs.gpu_was_emptied()
    assert epochs.clean and epochs.of_new_requests == epochs.number
    assert epochs.shared is told and (epochs.name == version_name("step-3")) is told


@pytest.mark.parametrize(
    ("method", "does"),
    [
        ("update_weights", True),
        ("start_weight_update", True),
        ("finish_weight_update", True),
        ("reload_weights", True),
        ("load_model", True),
        ("update_weights_from_ipc", True),
        ("update_named_param", True),
        ("receive_state_dict", True),
        ("_update_weight_cuda_ipc", True),
        ("process_weights_after_loading", True),
        ("init_weight_transfer_engine", False),
        ("shutdown_weight_transfer_engine", False),
        ("compute_weight_checksums", False),
        ("reset_mm_cache", False),
        ("get_model_inspection", False),
        ("save_sharded_state", False),
        (len, False),
        (b"pickled", False),
    ],
)
def test_what_is_named_like_a_change_of_weights(method: Any, does: bool) -> None:
    assert weights.may_change_weights(method) is does


class Core:
    """As much of vLLM's engine core as is watched."""

    def __init__(self, connector: Any) -> None:
        self.scheduler = SimpleNamespace(connector=connector)
        self.calls: list[Any] = []

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None) -> str:
        self.calls.append(method)
        return "answered"

    def set_weight_version(self, weight_version: str) -> None:
        self.calls.append(weight_version)


class Told:
    def __init__(self) -> None:
        self.told: list[str] = []

    def weights_change(self) -> None:
        self.told.append("change")

    def weights_version(self, version: str) -> None:
        self.told.append(version)


@pytest.fixture
def core_class() -> Iterator[type[Core]]:
    class Watched(Core):
        collective_rpc = Core.collective_rpc
        set_weight_version = Core.set_weight_version

    weights.watch(Watched)
    weights.watch(Watched)
    yield Watched


def test_the_engine_core_tells_its_connector(core_class: type[Core]) -> None:
    ours = Told()
    core = core_class(ours)
    assert core.collective_rpc("reload_weights", kwargs={"weights_path": "x"}) == "answered"
    core.collective_rpc(method="update_weights")
    core.collective_rpc("compute_weight_checksums")
    core.set_weight_version("step-1")
    core.set_weight_version(weight_version="step-2")
    assert ours.told == ["change", "change", "step-1", "step-2"], "once each, however often it is watched"
    assert core.calls == ["reload_weights", "update_weights", "compute_weight_checksums", "step-1", "step-2"]


def test_a_change_is_told_before_it_and_a_version_once_it_is_set(core_class: type[Core]) -> None:
    """Weights that were changed halfway have changed; a version that was refused is not one."""

    class Failing(core_class):  # type: ignore[misc, valid-type]
        pass

    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise ValueError("no")

    ours = Told()
    for name in ("collective_rpc", "set_weight_version"):
        setattr(Failing, name, fail)
    weights.watch(Failing)
    with pytest.raises(ValueError, match="no"):
        Failing(ours).collective_rpc("update_weights")
    with pytest.raises(ValueError, match="no"):
        Failing(ours).set_weight_version("step-1")
    assert ours.told == ["change"]


def test_among_several_connectors_ours_is_told(core_class: type[Core]) -> None:
    one, other = Told(), Told()
    core = core_class(SimpleNamespace(_connectors=[one, SimpleNamespace(), other]))
    core.collective_rpc("update_weights")
    assert one.told == other.told == ["change"]


@pytest.mark.parametrize("connector", [None, SimpleNamespace()])
def test_an_engine_with_another_connector_or_none_is_left_alone(core_class: type[Core], connector: Any) -> None:
    core = core_class(connector)
    core.collective_rpc("update_weights")
    core.set_weight_version("step-1")
    assert core.calls == ["update_weights", "step-1"]


def test_a_fault_of_ours_does_not_reach_vllm(core_class: type[Core], caplog: pytest.LogCaptureFixture) -> None:
    ours = Told()
    ours.weights_change = lambda: 1 // 0  # type: ignore[method-assign,assignment,return-value]
    assert core_class(ours).collective_rpc("update_weights") == "answered"
    assert "reset the prefix cache and the connector" in caplog.text


def test_a_core_that_knows_no_versions_is_watched_as_far_as_it_goes() -> None:
    class Old:
        scheduler = SimpleNamespace(connector=None)

        def collective_rpc(self, method: Any) -> None: ...

    weights.watch(Old)
    Old().collective_rpc("update_weights")
    assert not hasattr(Old, "set_weight_version")


def test_requests_of_no_epoch_load_and_store_nothing() -> None:
    with small_world():
        bench = Bench(1)
        entry = bench.sched.index.reserve(bytes(32), bytes(32), 0, CHUNK_TOKENS)
        assert entry is not None
        bench.sched.index.filled(entry, "host")
        assert len(bench.sched.index)
        bench.sched._new_epoch(lambda: bench.sched.epochs.weights_change(gpu_is_empty=False))
        assert not len(bench.sched.index)
        bench.sched._gpu.empty = lambda: False  # type: ignore[method-assign]
        request = bench.new_request([2] * 64)
        bench.sched.on_new_request(request)
        state = bench.sched.requests[request.request_id]
        assert state.epoch == NO_EPOCH and bench.sched.get_num_new_matched_tokens(request, 0) == (0, False)
        bench.sched._gpu.empty = lambda: True  # type: ignore[method-assign]
        request = bench.new_request([3] * 64)
        bench.sched.on_new_request(request)
        assert bench.sched.requests[request.request_id].epoch == bench.sched.epochs.number
        bench.close()


@pytest.mark.parametrize("value", ["", 7, "x" * 257, True])
def test_a_version_is_a_name(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"weights_version=.* is not possible; set a name of 1 to 256 characters"):
        EngineConfig.parse({"weights_version": value, "server": "off"})
    assert EngineConfig.parse({"weights_version": "step-1", "server": "off"}).weights_version == "step-1"
