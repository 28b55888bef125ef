"""The call styles of older systems over the same machinery: change an import, and the program runs under mezzo.

Thin layers: each says in mezzo's words what a call of that system means. What trains is a session.
"""
