"""Data sets and image folders."""
