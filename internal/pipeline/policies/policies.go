// Package policies makes a policy by the name that it has in the configuration.
package policies

import (
	"fmt"
	"strings"

	"jbofd/internal/pipeline"
	"jbofd/internal/pipeline/baseline"
	"jbofd/internal/pipeline/gimbal"
	"jbofd/internal/pipeline/jbof"
)

// Config is what any of the policies may need.
type Config struct {
	// Depth is the most I/Os that may be at the device, at least 1.
	Depth int
	// Profile is what jbof knows of the drive before it starts; zero if it must guess.
	Profile jbof.Profile
	// ReFlex and FlashFQ are the models of the drive that these need; what is 0 gets its
	// default, and Depth is the one above.
	ReFlex  baseline.ReFlexConfig
	FlashFQ baseline.FlashFQConfig
}

// makers are in the order in which Names gives them.
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
}

// Names are the policies there are.
func Names() []string {
	names := make([]string, len(makers))
	for i, m := range makers {
		names[i] = m.name
	}
	return names
}

// New makes the policy called name.
//
// Errors: no policy has that name, or the depth is less than 1.
func New(name string, cfg Config) (pipeline.Policy, error) {
	if cfg.Depth < 1 {
		return nil, fmt.Errorf("depth %d: at least 1", cfg.Depth)
	}
	for _, m := range makers {
		if m.name == name {
			return m.make(cfg), nil
		}
	}
	return nil, fmt.Errorf("no policy is called %q: one of %s", name, strings.Join(Names(), ", "))
}
