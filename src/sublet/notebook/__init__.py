"""The notebook: `%%gpu` cells in leased workers, `%gpu`, and a kernel that is leased whole."""
