# Completion of meshwright in fish, by `meshwright completion fish`.

@TABLES@

function __meshwright
    set -l words (commandline -opc)
    set -l cur (commandline -ct)
    set -l verb $words[2]
    set -l prev $words[-1]
    if test (count $words) = 1
        __meshwright_verbs ''
        return
    end
    set -l rows (__meshwright_verbs $verb)
    if test -n "$rows"
        if test (count $words) = 2
            printf '%s\n' $rows
            return
        end
        set verb "$verb $words[3]"
    end
    set -l before ''
    if string match -q -- '--*=*' $cur
        set prev (string split -m 1 = -- $cur)[1]
        set before "$prev="
        set cur (string replace -- $before '' $cur)
    end
    if contains -- $prev --help -h
        __meshwright_names $verb
        return
    end
    if string match -q -- '--*' $prev; and not string match -q -- '-*' $cur
        set rows (__meshwright_values "$verb $prev")
        if test (count $rows) = 0
            set rows (__meshwright_values "* $prev")
        end
        if test (count $rows) -gt 0
            __meshwright_offer "$before" "$cur" $rows
            return
        end
    end
    if string match -q -- '--*.*' $cur
        __meshwright_keys $verb
    else if string match -q -- '-*' $cur
        __meshwright_flags $verb
        __meshwright_keys $verb | string replace -r '^(--[a-z]+\.).*' '$1' | uniq
    else
        __meshwright_offer '' "$cur" (__meshwright_places $verb)
    end
end

# Print rows with what is typed before them, and files.
function __meshwright_offer
    for row in $argv[3..]
        switch $row
            case '@file*'
                __fish_complete_path "$argv[2]" | string replace -r '^' -- "$argv[1]"
            case '@folder*'
                __fish_complete_directories "$argv[2]" | string replace -r '^' -- "$argv[1]"
            case \t'*'
            case '*'
                echo "$argv[1]$row"
        end
    end
end

complete -c meshwright -f -a '(__meshwright)'
