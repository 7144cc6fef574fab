-- What was given up while its host was silent, for its warden to look at: asked at each of its looks.
CREATE INDEX receipt_given_up ON receipt (lease_id) WHERE ladder = 'unseen' AND proven = 0;
