"""Many engines behind one address: who is there, whom a request goes to, and how it gets there and back."""
