"""Second moments of hidden values, and how operations change them."""
