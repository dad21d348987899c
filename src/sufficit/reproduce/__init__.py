"""What `reproduce.py` is made of: the tables, what is asked, stages, files, words."""
