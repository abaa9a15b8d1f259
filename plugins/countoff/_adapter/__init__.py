"""What several adapters share. It imports torch, and none of the frameworks."""
