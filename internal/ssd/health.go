package ssd

import (
	"time"

	"jbofd/internal/nvme"
)

// Health is what a drive says of its own state.
type Health struct {
	// At is when it has said that.
	At time.Time
	// SMART is its SMART / Health Information log, in NVMe's form (NVMe Base 2.0, section 5.16.1.3).
	SMART nvme.SMARTLog
	// WarningKelvin and CriticalKelvin are the temperatures from which on it is too warm; 0: it does not say.
	WarningKelvin, CriticalKelvin uint16
	// Events counts what has happened to it since it was opened.
	Events [HealthEvents]uint64
}

// HealthEvent is a kind of event of a drive, beside its requests.
type HealthEvent uint8

// The kinds of events.
const (
	// EventError: something is wrong with the controller or with what it was asked.
	EventError HealthEvent = iota
	// EventSMART: a value of the SMART log is beyond its limit.
	EventSMART
	// EventNotice: something was changed, such as a namespace or the firmware.
	EventNotice
	// EventOther is any other that it reports of its own accord.
	EventOther
	// EventTimeout: a command took too long, and was aborted.
	EventTimeout
	// EventReset: its controller was reset, because it did not end a command, or has said what cannot be.
	EventReset
)

var eventNames = [...]string{"error", "smart", "notice", "other", "timeout", "reset"}

// HealthEvents is the number of kinds; valid kinds are below it.
const HealthEvents = HealthEvent(len(eventNames))

// String returns the kind's name as metrics write it.
func (e HealthEvent) String() string { return eventNames[e] }

// HealthReporter is a Device that may know its health.
type HealthReporter interface {
	Device
	// Health returns what the drive has said last, at most a few minutes ago; false if it does not say anything, or has
	// not for long. It does no I/O. Any goroutine may call it.
	Health() (Health, bool)
}

// HealthOf returns the health of a device, or false if it does not know it.
func HealthOf(d Device) (Health, bool) {
	if r, ok := d.(HealthReporter); ok {
		return r.Health()
	}
	return Health{}, false
}
