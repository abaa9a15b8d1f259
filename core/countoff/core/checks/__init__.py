"""The questions that countoff answers, one file each: what may be wrong, how it is found, and what to do about it."""
