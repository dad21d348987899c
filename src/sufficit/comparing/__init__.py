"""What `compare.py` is made of: settings, parts on disk, groups, shown images, files, words."""
