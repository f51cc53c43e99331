package replicas_test

import "jbofd/internal/replica"

func position(key []byte) uint64 { return replica.Position(testSeed, key) }
