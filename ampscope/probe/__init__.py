"""The probe side: knows torch; everything that touches the training process."""
