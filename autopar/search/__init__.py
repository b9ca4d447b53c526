"""The search: prices and a cluster in, a plan with its bound and gap out."""
