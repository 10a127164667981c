"""`eventlm explain`."""
