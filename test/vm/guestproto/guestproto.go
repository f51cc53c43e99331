// Package guestproto is the protocol between the test and the guest's init over a virtio-serial port: one JSON document
// per line.
//
// The guest speaks first: a Response with ID 0 says that it is up (or, in Problem, why not). After that the test sends
// Requests, as many at once as it likes, and each is answered by one Response with the same ID, in the order in which
// they end. A Request with Stream gets its output in Responses with More before that.
package guestproto

// PortName is the name of the virtio-serial port.
const PortName = "jbofd.vm.agent"

// Request asks the guest to do one thing.
type Request struct {
	// ID is repeated in the Response. 0 is taken by the greeting.
	ID uint64 `json:"id"`
	// Command is run by /bin/sh -c in a process group of its own. Empty when Kill is set.
	Command string `json:"command,omitempty"`
	// Kill is the ID of a running Request whose process group gets SIGKILL.
	Kill uint64 `json:"kill,omitempty"`
	// TimeoutMS ends the command with SIGKILL to its process group; 0 means never.
	TimeoutMS int64 `json:"timeout_ms,omitempty"`
	// Stream asks for the output, standard and error in one, while the command runs.
	Stream bool `json:"stream,omitempty"`
}

// Response is the outcome of one Request.
type Response struct {
	ID uint64 `json:"id"`
	// Code is the exit code; 128 and the signal's number when a signal ended the command.
	Code int `json:"code"`
	// More says that this is output of a command that runs, in Stdout, and that another Response follows.
	More bool `json:"more,omitempty"`
	// Stdout and Stderr are all that the command wrote; empty if it was streamed.
	Stdout []byte `json:"stdout,omitempty"`
	Stderr []byte `json:"stderr,omitempty"`
	// TimedOut is set when TimeoutMS ended the command.
	TimedOut bool `json:"timed_out,omitempty"`
	// Problem is set when the guest could not do what was asked at all.
	Problem string `json:"problem,omitempty"`
}
