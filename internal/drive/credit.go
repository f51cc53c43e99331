package drive

import "jbofd/internal/tenant"

// Credit is how much a tenant should have outstanding at this drive at most, in units of 4 KiB; 0: the policy does not
// say, or does not know the tenant yet. From any goroutine, but not from within a Sink's methods.
func (d *Drive) Credit(t tenant.ID) int {
	d.driver.Lock()
	defer d.driver.Unlock()
	return d.pipe.Credit(t)
}
