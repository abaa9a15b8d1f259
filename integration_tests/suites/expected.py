"""The differences that countoff is expected to make in other projects' tests, each with its reason."""

EXPECTED: dict[str, dict[str, str]] = {
    "lightning": {
        "*test_trainer_callback_hook_system*": "the test lists all callbacks of a Trainer; one more is there",
        "*test_configure_callbacks*": "the test lists all callbacks of a Trainer; one more is there",
        "*test_skip_training_step_not_allowed[[]2]": (
            "the test claims two ranks and starts one; countoff says that it cannot compare them"
        ),
    },
    "fabric": {},
    "composer": {},
    "accelerate": {},
}
"""Suite to patterns of test names (as of `fnmatch`) to reasons."""
