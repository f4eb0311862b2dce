"""The functions of `import trtserve`: what the commands do, for Python programs and their tests.

`trtserve/__init__.py` offers them under the package's own name and loads these modules when a name is first used.
"""
