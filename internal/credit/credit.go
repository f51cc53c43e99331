// Package credit is what hosts may have outstanding at an SSD, at both ends: the part
// of a tenant's credit that one of its hosts is given, and the window that a host
// keeps to it by.
//
//	policy ──> Part ──> completion ──> Window.Completed ──> Window.MaySend
//
// The format on the wire is package nvme's (nvme.Credit).
//
// Source: Gimbal (SIGCOMM'21), section 3.6 and Algorithm 3. The paper counts commands;
// here units of 4 KiB are counted, so that the credit of a tenant that mixes sizes does
// not jump.
package credit

// UnitBytes is what one unit of credit is worth.
const UnitBytes = 4096

// Units is what a command that moves so many bytes counts for: every unit that it
// fills in part or in whole, at least 1.
//
// hot: 0 allocs
func Units(lenBytes int) int { return max((lenBytes+UnitBytes-1)/UnitBytes, 1) }

// Part divides a tenant's units among windows that do not know of each other. It is
// at least 1, but 0 for 0: a policy that says nothing has nothing to divide.
//
// hot: 0 allocs
func Part(units, windows int) int {
	if units <= 0 {
		return 0
	}
	return max(units/max(windows, 1), 1)
}
