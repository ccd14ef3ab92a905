"""What tasks and hooks log beside metrics: values of kinds, pictures, and when it may be done."""
