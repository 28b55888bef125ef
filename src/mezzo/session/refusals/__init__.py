"""What a session and its calls refuse, before anything is changed."""
