package kvstore

import "jbofd/internal/uuid"

// UUID identifies the partition, once it is open.
func (s *Store) UUID() uuid.UUID { return s.cfg.UUID }
