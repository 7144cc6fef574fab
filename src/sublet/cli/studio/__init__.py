"""`sublet serve`, `tenant`, `quota`, `price`, `report`."""
