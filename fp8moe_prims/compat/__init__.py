"""Drop-in forms of other libraries' grouped matmuls, and their quantization rules as recipes.

Each refuses, by name, what it cannot translate; nothing here imports the other library unless a
call needs it.
"""
