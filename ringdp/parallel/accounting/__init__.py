"""What a rank holds and sends: counted, and by formula."""
