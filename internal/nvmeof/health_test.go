package nvmeof_test

import (
	"testing"

	"jbofd/internal/nvme"
)

// A host's SMART log has the worst that the drives of its namespaces say, and nothing that none of them has said.
func TestSMARTLogHasTheWorstOfTheHostsDrives(t *testing.T) {
	r := newRig(t)
	state := testState()
	list := state.Subsystems[0].Namespaces
	list[0].SSD, list[1].SSD, list[2].SSD = 1, 2, 3 // the last one is hostA's alone
	r.target.Apply(state)
	a, b := r.connect(hostA, open), r.connect(hostB, open)
	drives := map[int]*nvme.SMARTLog{}
	r.health = func(ssd int) (nvme.SMARTLog, bool) {
		if l := drives[ssd]; l != nil {
			return *l, true
		}
		return nvme.SMARTLog{}, false
	}
	type values struct {
		warning      uint8
		kelvin       uint16
		spare, least uint8
		used         uint8
		cycles       nvme.Uint128
		unsafe       nvme.Uint128
		warm, hot    uint32
	}
	set := func(v values) *nvme.SMARTLog {
		var l nvme.SMARTLog
		l.SetCriticalWarning(v.warning)
		l.SetTemperature(v.kelvin)
		l.SetAvailableSpare(v.spare)
		l.SetAvailableSpareThreshold(v.least)
		l.SetPercentageUsed(v.used)
		l.SetPowerCycles(v.cycles)
		l.SetUnsafeShutdowns(v.unsafe)
		l.SetWarningTempTime(v.warm)
		l.SetCriticalTempTime(v.hot)
		l.SetMediaErrors(nvme.U128(77)) // of all who use the drive
		l.SetHostReads(nvme.U128(78))
		return &l
	}
	check := func(when string, host string, want values) {
		t.Helper()
		c := a
		if host == hostB {
			c = b
		}
		_, data := r.must(c, getLog(nvme.LIDSMART, 512), nil)
		l := (*nvme.SMARTLog)(data)
		got := values{l.CriticalWarning(), l.Temperature(), l.AvailableSpare(), l.AvailableSpareThreshold(),
			l.PercentageUsed(), l.PowerCycles(), l.UnsafeShutdowns(), l.WarningTempTime(), l.CriticalTempTime()}
		if got != want || l.MediaErrors() != nvme.U128(0) || l.HostReads() != nvme.U128(0) {
			t.Errorf("%s: %+v, want %+v", when, got, want)
		}
	}
	check("no drive says anything", hostA, values{})
	drives[2] = set(values{1, 300, 90, 10, 5, nvme.U128(7), nvme.U128(1), 3, 0})
	check("one says something", hostB, values{1, 300, 90, 10, 5, nvme.U128(7), nvme.U128(1), 3, 0})
	drives[1] = set(values{4, 310, 70, 1, 3, nvme.Uint128{Hi: 1}, nvme.U128(0), 0, 9})
	check("another one", hostB, values{5, 310, 70, 1, 5, nvme.Uint128{Hi: 1}, nvme.U128(1), 3, 9})
	drives[3] = set(values{8, 320, 95, 94, 200, nvme.U128(0), nvme.U128(5), 0, 0})
	drives[0] = set(values{16, 400, 0, 50, 255, nvme.U128(0), nvme.U128(50), 99, 99}) // no namespace is on it
	check("the drive of a namespace of another host", hostB,
		values{5, 310, 70, 1, 5, nvme.Uint128{Hi: 1}, nvme.U128(1), 3, 9})
	check("the drive of its own", hostA, values{13, 320, 95, 94, 200, nvme.Uint128{Hi: 1}, nvme.U128(5), 3, 9})
	r.health = nil
	check("no driver says anything", hostA, values{})
}
