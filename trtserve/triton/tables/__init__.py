"""The tensors, steps and parameters of NVIDIA's Triton models in every release, as text tables.

Source: config.pbtxt of the tagged releases, as summarised in the interface reference of this project.
Columns of a tensor row: name, type, dims, flags (`-` for none), first release, last release (nothing = still there).
A `$word` in the type column is a type that is chosen when the repository is made.
The tables called UNION_… hold what no release has and only a repository for clients of all releases gets: the finish
reason (under the names of NVIDIA's llmapi model) and adapters by name.
"""
