// Package policies creates policies by their names in the configuration.
package policies

import (
	"fmt"
	"strings"

	"jbofd/internal/pipeline"
	"jbofd/internal/pipeline/baseline"
	"jbofd/internal/pipeline/gimbal"
	"jbofd/internal/pipeline/jbof"
)

// Config holds the parameters of all policies.
type Config struct {
	// Depth is the most I/Os that may be at the device, at least 1.
	Depth int
	// Profile is what calibration measured for policy jbof; the zero Profile means a typical drive.
	Profile jbof.Profile
	// ReFlex, FlashFQ and IOCost hold the drive models of these policies. Zero fields get their defaults; their Depth
	// is replaced by the one above.
	ReFlex  baseline.ReFlexConfig
	FlashFQ baseline.FlashFQConfig
	IOCost  baseline.IOCostConfig
}

// makers lists the policies in the order in which Names returns them.
var makers = []struct {
	name string
	make func(Config) pipeline.Policy
}{
	{"fifo", func(c Config) pipeline.Policy { return pipeline.NewFIFO(c.Depth) }},
	{"gimbal", func(c Config) pipeline.Policy { return gimbal.New(gimbal.Config{Depth: c.Depth}) }},
	{"jbof", func(c Config) pipeline.Policy { return jbof.New(jbof.Config{Depth: c.Depth, Profile: c.Profile}) }},
	{"reflex", func(c Config) pipeline.Policy {
		c.ReFlex.Depth = c.Depth
		return baseline.NewReFlex(c.ReFlex)
	}},
	{"flashfq", func(c Config) pipeline.Policy {
		c.FlashFQ.Depth = c.Depth
		return baseline.NewFlashFQ(c.FlashFQ)
	}},
	{"iocost", func(c Config) pipeline.Policy {
		c.IOCost.Depth = c.Depth
		return baseline.NewIOCost(c.IOCost)
	}},
}

// Names returns the names of all policies.
func Names() []string {
	names := make([]string, len(makers))
	for i, m := range makers {
		names[i] = m.name
	}
	return names
}

// New creates the policy called name.
//
// Errors: name is unknown, or the depth is less than 1.
func New(name string, cfg Config) (pipeline.Policy, error) {
	if cfg.Depth < 1 {
		return nil, fmt.Errorf("depth is %d, must be at least 1", cfg.Depth)
	}
	for _, m := range makers {
		if m.name == name {
			return m.make(cfg), nil
		}
	}
	return nil, fmt.Errorf("policy is %q, must be one of %s", name, strings.Join(Names(), ", "))
}
