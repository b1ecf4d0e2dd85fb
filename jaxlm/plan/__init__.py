"""What a run will take, before anything is rented."""
