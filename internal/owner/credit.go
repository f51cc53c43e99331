package owner

import "jbofd/internal/pipeline"

// Credit is what a tenant should have outstanding at this SSD at most, in units of
// 4 KiB; 0: the policy does not say, or does not know the tenant yet. From any goroutine.
func (o *Owner) Credit(t pipeline.Tenant) int {
	o.mu.Lock()
	units := o.pipe.Credit(t)
	o.unlock()
	o.run() // who came meanwhile has left his work in the inbox
	return units
}
