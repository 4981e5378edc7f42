"""The TierKV store server: owns the disk and shared tiers and maps keys to payloads."""
