"""What several adapters share. It imports torch; `prepared_*` import Accelerate, on which the Trainer is built."""
