"""The differences that countoff is expected to make in other projects' tests, each with its reason."""

EXPECTED: dict[str, dict[str, str]] = {
    "lightning": {
        "*test_checkpoint_callbacks_are_last": "the test lists all callbacks of a Trainer; one more is there",
        "*test_attach_model_callbacks": "the test lists all callbacks of a Trainer; one more is there",
        "*test_device_stats_cpu[[]*": "the test's logger refuses a record without CPU statistics; the totals are one",
        "*test_logger_after_fit_predict_test_calls": "the test lists all that is logged; the totals are logged too",
        "*test_validation_step_log_with_tensorboard": "the test lists the logger's calls; countoff logs the totals too",
        "*test_eval_step_logging[[]*": "the test lists the logger's calls; countoff logs the totals too",
        "*test_log_on_train_start": "the test lists the logger's calls; countoff logs the totals too",
        "*test_skip_training_step_not_allowed[[]2]": (
            "the test claims two ranks and starts one; countoff says that it cannot compare them"
        ),
    },
    "composer": {
        "*test_rank_dependent_dataloader_lengths": "the ranks' loaders differ in length; countoff says what is cut",
    },
    "accelerate": {},
}
"""Suite to patterns of test names (as of `fnmatch`) to reasons."""
