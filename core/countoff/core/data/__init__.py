"""What a rank has read, as fingerprints that ranks can compare."""
