"""What must be so in every world, and how that is seen."""
