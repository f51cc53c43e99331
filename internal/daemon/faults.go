package daemon

import (
	"jbofd/internal/config"
	"jbofd/internal/ssd"
	"jbofd/internal/ssd/fault"
)

// wrapFaults makes dev fail as the configuration asks.
func wrapFaults(dev ssd.Device, fc *config.Fault) (ssd.Device, error) {
	return fault.New(dev, fault.Config{
		Seed:                 uint64(fc.Seed),
		ReadErrorProbability: fc.ReadErrorProbability, WriteErrorProbability: fc.WriteErrorProbability,
		FlushErrorProbability: fc.FlushErrorProbability,
		DelayProbability:      fc.DelayProbability, Delay: fc.Delay,
	})
}
