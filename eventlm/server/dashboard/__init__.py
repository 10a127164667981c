"""The dashboard of a running server: its page, and the frames that the page draws."""
