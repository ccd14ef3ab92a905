"""The rank's side: its place, how it joins the others, its threads and signals."""
