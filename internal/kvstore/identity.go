package kvstore

// UUID is the partition's, once it is open.
func (s *Store) UUID() [16]byte { return s.cfg.UUID }
