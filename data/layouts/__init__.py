"""Search for the files of a data set: layouts of other trainers, captions, masks and control images beside pictures."""
