"""A run: images, heatmap sources and a config in, units on disk, results out."""
