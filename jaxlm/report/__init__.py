"""Pages for people: one self-contained HTML file each, without scripts and without anything fetched."""
