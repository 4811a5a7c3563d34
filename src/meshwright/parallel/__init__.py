"""How a model is split over a mesh: one file per axis, and one place where anything crosses a link."""
