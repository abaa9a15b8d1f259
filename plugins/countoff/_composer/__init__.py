"""The adapter for Composer: its State and loaders, read and observed. Does not import Composer itself."""
