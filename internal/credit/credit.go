// Package credit implements credits, which bound what hosts have outstanding at an SSD, for both ends: the target
// divides a tenant's credit among its hosts, and a window at the host observes it.
//
//	policy ──> Part ──> completion ──> Window.Completed ──> Window.MaySend
//
// The format on the wire is package nvme's (nvme.Credit).
//
// Source: Gimbal (SIGCOMM'21), section 3.6 and Algorithm 3. The paper counts commands. Here units of 4 KiB are counted,
// so that the credit of a tenant with mixed sizes does not jump.
package credit

// UnitBytes is the size of a credit unit.
const UnitBytes = 4096

// Units returns how many units a command that transfers this many bytes takes: the units that it fills in part or in
// whole, at least 1.
//
// hot: 0 allocs
func Units(lenBytes int) int { return max((lenBytes+UnitBytes-1)/UnitBytes, 1) }

// Part divides a tenant's units among windows that work independently. The result is at least 1, but 0 for 0 units,
// which means that the policy computes no credits.
//
// hot: 0 allocs
func Part(units, windows int) int {
	if units <= 0 {
		return 0
	}
	return max(units/max(windows, 1), 1)
}
