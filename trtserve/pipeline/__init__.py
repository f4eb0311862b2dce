"""The stages: import, convert, build, repo, and what plans them."""
