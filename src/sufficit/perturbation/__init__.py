"""Masks as bands of a heatmap, fills for hidden pixels, and the loop that calls the model."""
