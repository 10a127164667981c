"""The files of a checkpoint's folder, read and checked. Loads no torch."""
