package admin

import "jbofd/internal/ssd"

// Memory is memory of a drive beside its namespaces. If Error is set, it cannot be written.
type Memory struct {
	// Kind is "pmr" (Persistent Memory Region) or "cmb" (Controller Memory Buffer).
	Kind       string `json:"kind"`
	SizeBytes  int64  `json:"sizeBytes"`
	Persistent bool   `json:"persistent"`
	// NotRestored: what it had before the drive lost its power may be lost.
	NotRestored bool   `json:"notRestored,omitempty"`
	Error       string `json:"error,omitempty"`
}

// NewMemory returns the memory of a drive.
func NewMemory(d ssd.Device) (all []Memory) {
	for _, a := range ssd.Areas(d) {
		i := a.Info()
		m := Memory{Kind: i.Kind, SizeBytes: i.SizeBytes, Persistent: i.Persistent, NotRestored: i.NotRestored}
		if err := a.Healthy(); err != nil {
			m.Error = err.Error()
		}
		all = append(all, m)
	}
	return all
}
