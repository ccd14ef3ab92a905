"""What happens in a rank: where it is, how it joins the others, its threads and signals."""
