"""What an ansatz can do: its gradients, its states and their entanglement, over random angles."""
