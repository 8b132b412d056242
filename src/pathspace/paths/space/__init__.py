"""Path space: skeletons, basis paths, and steps in their values (S19)."""
